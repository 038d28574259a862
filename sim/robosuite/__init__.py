"""robosuite 1.4's tasks with the Panda arm. Importing this loads no simulator."""
