"""Stock releases side by side with the overlay; used by `check` and the tests.

wheels (fetch) -> loader (mount) -> harness (a release's forward and commit on a world) -> comparison (bits) -> matrix
"""
