"""One command tree for all tests of this folder."""

import tests.program  # noqa: F401
