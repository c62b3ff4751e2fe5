"""Pipeline parallelism: programs on paper, and the stages and interpreter that run them."""
