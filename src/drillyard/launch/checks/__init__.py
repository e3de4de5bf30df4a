"""What is known to go wrong, looked for before anything is sent."""
