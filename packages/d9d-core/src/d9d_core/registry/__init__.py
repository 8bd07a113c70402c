"""Registry of plugins: discovery of entry points, records with their origins, policies, capability tokens."""
