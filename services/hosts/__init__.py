"""What one process of the mesh hosts: its rooms, its engine, and how it is started."""
