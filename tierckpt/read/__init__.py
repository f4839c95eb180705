"""From any tier to memory: the copies of a file, nearest first, read in parallel and verified."""
