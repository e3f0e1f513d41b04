"""Before a bundled kernel is used in a process: the same launch and stock's, on synthetic data, bit by bit."""
