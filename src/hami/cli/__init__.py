"""The hami command: one module per subcommand, no logic of its own."""
