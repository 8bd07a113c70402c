"""Where logged values go: the trackers that core brings along."""
