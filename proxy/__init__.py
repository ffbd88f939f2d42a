"""The edge: HTTP surfaces, prediction, routing and the streams to the workers."""
