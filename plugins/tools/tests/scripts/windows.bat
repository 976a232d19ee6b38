rem {"data": ["C:\\my photos"], "output_dir": ["C:\\out\\"], "other": ["$x"]}
rem don't stop
set "DATA=C:\my photos"
python train.py ^
  --data "%DATA%" --output_dir C:\out\ --other $x
