probe $'in\nprobe: error: forged\e[2J' out --fail 4
