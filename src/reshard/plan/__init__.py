"""Which bytes go which way: cells, route classes, cut points, balance, proof. Pure."""
