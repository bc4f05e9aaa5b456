"""Run the command line as ``python -m reshard``."""

from reshard.cli.main import main

# Processes that a verb starts import this file again under another name; only the first one is a command.
if __name__ == "__main__":
    main()
