"""What attention may have beside queries, keys and values: a softmax with a sink, and layers that know no positions."""
