"""From any tier to memory: reads the nearest good copy of a file, in parallel and verified."""
