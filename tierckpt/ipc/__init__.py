"""The client of the agent's Unix socket; starting child processes."""
