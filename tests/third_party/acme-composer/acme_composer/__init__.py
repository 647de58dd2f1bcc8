"""A sample third-party plugin."""
