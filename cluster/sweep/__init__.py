"""A sweep: counting in parallel, timing alone."""
