"""From layouts in two worlds to weights that have moved: agreeing on a plan, compiling it, running it."""
