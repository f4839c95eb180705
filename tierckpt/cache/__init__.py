"""The node cache: this node's models and data files, as real files in plain directories."""
