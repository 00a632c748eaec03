"""What only runs things: it executes notebooks, publishes and checks results, plans, and builds the site."""
