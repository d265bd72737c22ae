"Without the cells that are written for a GPU's float16"
