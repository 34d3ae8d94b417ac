"""Console commands, each a module with `main(argv) -> exit status`."""
