"""Parts of bench/fanout.py."""
