"""One folder per device operation, each with its reference and its conformance specs."""
