"""File formats of agent sessions, one module each, contributed through `composer_trace_readers`."""
