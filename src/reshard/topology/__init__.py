"""What joins the ranks. Pure."""
