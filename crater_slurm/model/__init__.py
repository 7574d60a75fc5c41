"""What things are: profiles, requests, plans and their units. Plain typed data, no I/O."""
