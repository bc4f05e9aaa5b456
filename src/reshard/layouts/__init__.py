"""Who holds what: boxes, meshes, placements, layouts, pieces, bindings and manifests. Pure: ints and text."""
