"""Why a test of a peer's suite fails or tests nothing on our side, where it passes on the peer's.

A test without a line here makes `make test-peers` exit 1; so does a line whose tests all pass. The key is a
regular expression for the test's whole name, without its class.
"""

REASONS: dict[str, str] = {}
