"""Fails as plugins do after an upgrade of something they lean on."""

raise RuntimeError("acme_broken was made for another world")
