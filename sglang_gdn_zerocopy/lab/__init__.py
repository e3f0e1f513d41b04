"""Stock releases side by side with the overlay; used by `check` and the tests."""
