"""The command line's application, output, plots and shared options."""
