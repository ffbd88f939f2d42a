"""The edge: nginx before any number of proxies, with a list of them that is never old."""
