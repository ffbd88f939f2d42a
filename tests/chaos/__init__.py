"""Minutes of random faults and random clients, after which every response is accounted for: `make chaos`."""
