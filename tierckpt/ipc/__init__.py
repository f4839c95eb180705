"""Between processes of one node: the client of the agent's Unix socket, and starting child processes."""
