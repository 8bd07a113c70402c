"""Pipeline schedules as data, their simulator and their pictures."""
