"""From any tier to memory."""
