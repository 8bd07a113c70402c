"""Starting the processes of a job on one machine, and being one of them."""
