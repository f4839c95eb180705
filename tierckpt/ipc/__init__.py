"""Between processes of one node: the client of the agent's Unix socket, and starting Python processes of ours."""
