"""Show plans to people: values in, text out, no files and no terminal."""
