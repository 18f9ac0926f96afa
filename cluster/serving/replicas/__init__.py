"""Several engines behind one ingress, as Ray Serve's replicas."""
