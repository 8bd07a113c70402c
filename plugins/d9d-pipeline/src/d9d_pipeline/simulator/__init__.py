"""How long programs take, where they wait, and what they hold, without a GPU."""
