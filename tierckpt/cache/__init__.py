"""The node cache: what this node has of models and data files, as real files in plain directories."""
