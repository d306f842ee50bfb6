# Below the values that infra_cdk/hosts.py puts in front: what a Docker host runs once, at its first start.
set -euo pipefail
dnf install -y -q docker nftables jq
# Sandboxes go on while the engine is restarted, by an update of its package, too.
install -d -m 755 /etc/docker
echo '{"live-restore": true}' >/etc/docker/daemon.json
# Workspaces on disk are files behind loop devices.
echo loop >/etc/modules-load.d/sandfleet.conf
modprobe loop
# For each crash in a sandbox, the program that a piped core_pattern names would run here, outside of all limits.
echo kernel.core_pattern=core >/etc/sysctl.d/90-sandfleet.conf
sysctl -q -p /etc/sysctl.d/90-sandfleet.conf
systemctl enable --now docker
install -d -m 700 "$DATA" /etc/sandfleet
printf '%s\n' "$HOST_ENVIRONMENT" >/etc/sandfleet/host.env
printf '%s\n' "$EXECUTOR_ENVIRONMENT" >/etc/sandfleet/executor.env
printf '%s\n' "$COLLECTOR_ENVIRONMENT" >/etc/sandfleet/collector.env
chmod 600 /etc/sandfleet/*.env

# Secret variables of the graphs: read at each start of the executor, never on a command line.
cat >/etc/sandfleet/secrets.sh <<END
#!/bin/bash
set -euo pipefail
umask 077
: >/run/sandfleet-secrets.env
jq -r 'to_entries[] | [.key, .value] | @tsv' <<<'$SECRETS' | while IFS=\$'\t' read -r name source; do
  secret=\${source%:*} key=\${source##*:}
  value=\$(aws secretsmanager get-secret-value --region '$REGION' --secret-id "\$secret" --query SecretString --output text | jq -r --arg key "\$key" '.[\$key]')
  printf '%s=%s\n' "\$name" "\$value" >>/run/sandfleet-secrets.env
done
END

# Images come from the deployment's own registry, whose password is good for twelve hours: log in before each pull.
cat >/etc/sandfleet/pull.sh <<END
#!/bin/bash
set -euo pipefail
registry=\${1%%/*}
case \$registry in
  *.dkr.ecr.*) aws ecr get-login-password --region '$REGION' | docker login --username AWS --password-stdin "\$registry" ;;
esac
docker image inspect "\$1" >/dev/null 2>&1 || docker pull -q "\$1"
END

# What the machine knows of itself, and asks of its group.
cat >/etc/sandfleet/machine.sh <<END
read_metadata() {
  local token
  token=\$(curl -sf -m 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token) || return
  curl -sf -m 5 -H "X-aws-ec2-metadata-token: \$token" "http://169.254.169.254/latest/meta-data/\$1"
}
complete() { # HOOK CONTINUE|ABANDON
  local id group
  id=\$(read_metadata instance-id)
  group=\$(aws autoscaling describe-auto-scaling-instances --region '$REGION' --instance-ids "\$id" --query 'AutoScalingInstances[0].AutoScalingGroupName' --output text)
  aws autoscaling complete-lifecycle-action --region '$REGION' --lifecycle-hook-name "\$1" --auto-scaling-group-name "\$group" --instance-id "\$id" --lifecycle-action-result "\$2"
}
# The daemon answers, whatever it says to a request without a token; and the executor has loaded its graphs.
works() {
  curl -s -o /dev/null -m 2 http://127.0.0.1:$HOST_PORT/ && curl -sf -o /dev/null -m 2 http://$EXECUTOR_METRICS/metrics
}
END

# At each start. The group counts the machine, and a deployment goes on to the next one, when both answer; one on which they do
# not is replaced, and its deployment rolled back. A machine for the warm pool only gets ready: it is stopped then.
cat >/etc/sandfleet/launched.sh <<END
#!/bin/bash
set -uo pipefail
. /etc/sandfleet/machine.sh
until state=\$(read_metadata autoscaling/target-lifecycle-state); do sleep 2; done
case \$state in
  Warmed:*)
    /etc/sandfleet/pull.sh '$HOST_IMAGE' && /etc/sandfleet/pull.sh '$EXECUTOR_IMAGE' && /etc/sandfleet/pull.sh '$SANDBOX_BASE'
    complete launch CONTINUE
    exit 0
    ;;
esac
systemctl start --no-block sandfleet-host sandfleet-executor
result=ABANDON
for ((waited = 0; waited < $START_S; waited += 5)); do
  if works; then
    result=CONTINUE
    break
  fi
  sleep 5
done
complete launch "\$result" || true # an instance that was only started anew waits at no hook
[ "\$result" = CONTINUE ] && status=SUCCESS || status=FAILURE
aws cloudformation signal-resource --region '$REGION' --stack-name '$STACK' --logical-resource-id '$GROUP' --unique-id "\$(read_metadata instance-id)" --status "\$status" || true
END

# The machine's own word that it is to go: a lifecycle state, or a Spot notice. Executor first, so that its runs are handed
# over while their sandboxes stand; then the daemon, which keeps their workspaces. One that does not work says so, and is
# replaced: AWS itself only sees that the machine runs.
cat >/etc/sandfleet/drain.sh <<END
#!/bin/bash
set -uo pipefail
. /etc/sandfleet/machine.sh
failed=0
while sleep 5; do
  state=\$(read_metadata autoscaling/target-lifecycle-state || true)
  if works || [ "\$state" != InService ]; then
    failed=0
  elif ((++failed == $SICK_S / 5)); then
    aws autoscaling set-instance-health --region '$REGION' --instance-id "\$(read_metadata instance-id)" --health-status Unhealthy || failed=0
  fi
  if [ "\$state" = Terminated ] || read_metadata spot/instance-action >/dev/null; then
    systemctl stop sandfleet-executor
    systemctl stop sandfleet-host
    complete drain CONTINUE
    exit 0
  fi
done
END
chmod 700 /etc/sandfleet/*.sh

# Without a buffer of its own, a log that does not answer would stop whoever writes a line: leases would not be renewed.
LOGS="--log-driver awslogs --log-opt mode=non-blocking --log-opt max-buffer-size=4m --log-opt awslogs-region=$REGION --log-opt awslogs-group=$LOG_GROUP"
. /etc/sandfleet/machine.sh
# The scaler knows hosts by this name, executors and gateway reach them at this address.
INSTANCE=$(read_metadata instance-id)
ADDRESS=$(read_metadata local-ipv4)

# The daemon works on the machine itself: its engine, its packet filter, its control groups. It is the only part that does.
# In a namespace of its own it would read paths of control groups that are not those below /sys/fs/cgroup.
cat >/etc/systemd/system/sandfleet-host.service <<END
[Unit]
Description=sandfleet sandbox host
Wants=docker.service
After=docker.service network-online.target
StartLimitIntervalSec=0
[Service]
ExecStartPre=/etc/sandfleet/pull.sh $HOST_IMAGE
ExecStartPre=/etc/sandfleet/pull.sh $SANDBOX_BASE
ExecStartPre=-/usr/bin/docker rm -f sandfleet-host
ExecStartPre=/usr/bin/docker run --rm -v /var/run/docker.sock:/var/run/docker.sock --entrypoint python3 $HOST_IMAGE -P -m sandfleet.fleet.host.base_image --from $SANDBOX_BASE
ExecStart=/usr/bin/docker run --name sandfleet-host --privileged --network host --pid host --cgroupns host --env-file /etc/sandfleet/host.env -e SANDFLEET_HOST_ID=$INSTANCE -e SANDFLEET_HOST_DIR=$DATA/host -e SANDFLEET_HOST_SOCKET=$DATA/host.sock -e SANDFLEET_HOST_LISTEN=0.0.0.0:$HOST_PORT -e SANDFLEET_HOST_ADDRESS=http://$ADDRESS:$HOST_PORT -e SANDFLEET_METRICS_LISTEN=$HOST_METRICS -v /dev:/dev -v /var/run/docker.sock:/var/run/docker.sock -v $DATA:$DATA -v /sys/fs/cgroup:/sys/fs/cgroup $LOGS --log-opt awslogs-stream=host-$INSTANCE $HOST_IMAGE
ExecStop=/usr/bin/docker stop -t $HOST_STOP_S sandfleet-host
# All that comes before the start counts, and images may come slowly: killed meanwhile, it would begin anew for ever.
TimeoutStartSec=infinity
TimeoutStopSec=$((HOST_STOP_S + 10))
Restart=always
RestartSec=1
END

cat >/etc/systemd/system/sandfleet-executor.service <<END
[Unit]
Description=sandfleet executor
Wants=docker.service
After=sandfleet-host.service
StartLimitIntervalSec=0
[Service]
ExecStartPre=/etc/sandfleet/pull.sh $EXECUTOR_IMAGE
ExecStartPre=/etc/sandfleet/secrets.sh
ExecStartPre=-/usr/bin/docker rm -f sandfleet-executor
ExecStart=/usr/bin/docker run --name sandfleet-executor --network host --read-only --tmpfs /tmp --cap-drop ALL --user 0 --security-opt no-new-privileges --env-file /etc/sandfleet/executor.env --env-file /run/sandfleet-secrets.env -e SANDFLEET_HOST_ID=$INSTANCE -e SANDFLEET_HOST_SOCKET=$DATA/host.sock -e SANDFLEET_METRICS_LISTEN=$EXECUTOR_METRICS -v $DATA:$DATA $LOGS --log-opt awslogs-stream=executor-$INSTANCE $EXECUTOR_IMAGE
ExecStop=/usr/bin/docker stop -t $EXECUTOR_STOP_S sandfleet-executor
TimeoutStartSec=infinity
TimeoutStopSec=$((EXECUTOR_STOP_S + 10))
Restart=always
RestartSec=1
END

# It starts the two above, at each start of the machine.
cat >/etc/systemd/system/sandfleet-launched.service <<END
[Unit]
Description=sandfleet tells its group that it works
After=docker.service network-online.target
[Service]
Type=exec
ExecStart=/etc/sandfleet/launched.sh
[Install]
WantedBy=multi-user.target
END

cat >/etc/systemd/system/sandfleet-drain.service <<END
[Unit]
Description=sandfleet drains before this machine goes
After=network-online.target
[Service]
ExecStart=/etc/sandfleet/drain.sh
Restart=on-failure
[Install]
WantedBy=multi-user.target
END
if [ -n "$COLLECTOR_IMAGE" ]; then
  cat >/etc/systemd/system/sandfleet-collector.service <<END
[Unit]
Description=sandfleet's spans and metrics, on their way to AWS
Wants=docker.service
After=docker.service network-online.target
StartLimitIntervalSec=0
[Service]
ExecStartPre=/etc/sandfleet/pull.sh $COLLECTOR_IMAGE
ExecStartPre=-/usr/bin/docker rm -f sandfleet-collector
ExecStart=/usr/bin/docker run --name sandfleet-collector --network host --read-only --cap-drop ALL --memory 256m --env-file /etc/sandfleet/collector.env -e AWS_REGION=$REGION $LOGS --log-opt awslogs-stream=collector-$INSTANCE $COLLECTOR_IMAGE $COLLECTOR_COMMAND
TimeoutStartSec=infinity
Restart=always
RestartSec=5
[Install]
WantedBy=multi-user.target
END
fi
systemctl daemon-reload
systemctl enable --now sandfleet-launched sandfleet-drain ${COLLECTOR_IMAGE:+sandfleet-collector}
