"""These are packages of their own: tests/e2e/test_third_party.py installs them and runs their tests."""

collect_ignore = ["acme-composer", "acme-broken"]
