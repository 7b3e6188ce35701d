ROWS = ()
LEFT_OUT = ()
