"""A framework's layouts as ours; what is shared by several frameworks is in ``tracing`` and the files that it uses."""
