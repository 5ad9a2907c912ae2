"""How the mesh is put on machines: images, compose files, configuration, scaling scripts."""
