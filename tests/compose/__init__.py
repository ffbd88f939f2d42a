"""docker-compose.yml for real, on a Docker engine: it comes up in order, scales, and loses nothing when parts die."""
