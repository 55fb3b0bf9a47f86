from smallmind.cli import main
