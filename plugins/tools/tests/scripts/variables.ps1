# {"data": ["C:\\photos"]}
$data = "C:\photos"
$env:A = 1
python train.py `
  --data $data
