# {"a": ["1 2"], "b": [], "c": ["3"], "d": ["4"]}
$all = @(
  '--a', "1 2"
  '--b'
)
$all += @("--c", "3")
& accelerate launch train.py @all --d 4
